"""The `graph.tasks` of a configuration -> a list of tasks: one module a layout, `reading` for all of them."""
