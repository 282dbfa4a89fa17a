"""Commands that change a run: start it, hand it in, stop it, grow and shrink it, export what it trained."""
