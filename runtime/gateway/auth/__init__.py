"""API keys, rate limits, and the usage log.

key_store       reads API keys from a file of hashes, and reloads it when it changes
edit_keys_file  adds keys to the file and revokes them
limits          token and request limits per minute and day
admission       implements `Admission` with keys and limits, or without keys
usage_database  schema of the usage log's SQLite database
usage_log       writes usage records, and prompts and answers if requested
usage_report    sums over the usage log
"""
