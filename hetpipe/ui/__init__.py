"""The pages of `hetpipe ui`: the runs of a folder, one run, and several runs side by side, in a browser."""
