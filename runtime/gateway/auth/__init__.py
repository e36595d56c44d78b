"""Who may ask, how much, and who did.

keys           API keys: a file of hashes, read again when it changes
keys_file      adds a key to the file, or takes one away
limits         requests and tokens in a minute, tokens in a day; pure
admission      keys and limits as the gateway's `Admission`; an `Admission` that logs
usage_schema   the usage log's database
usage_log      writes it, in a thread of its own
payloads       prompts and answers for the usage log, where that is asked for
usage_report   sums of what it holds
"""
