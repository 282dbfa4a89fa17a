"""BERT of Hugging Face as a classifier: is it prose or code?"""
