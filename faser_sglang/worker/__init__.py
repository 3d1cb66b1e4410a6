"""Drives SGLang's runtime: drafting, packed verification, commit."""
