"""Which devices form which virtual worker? `policy.py` asks; the other files are the answers and their parts."""
