"""What the user calls their tasks -> a list of tasks: one module for each layout, `reading` for what all must hold."""
