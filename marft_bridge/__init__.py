"""The command line, the recorder, the model server and the comparison: what joins graphs, traces and trainer."""
