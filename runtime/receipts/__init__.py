"""Receipts of answers: what was answered by which weights, without any text, and signed.

receipt     the fields of a receipt, its MAC, and the object that makes them
base_hash   a hash of the base model's files, remembered between starts
"""
