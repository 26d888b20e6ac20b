"""The pages of docs/ that are written from where things are declared; tests hold them equal to that."""
