"""The model calls of a node: which server and adapter they go to, what they request, which tokens came back."""
