"""Is the training real, and will it fit into memory?"""
