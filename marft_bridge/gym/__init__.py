"""Tasks and scores of reasoning-gym, which runs in processes of its own: some of its scorers evaluate answers."""
