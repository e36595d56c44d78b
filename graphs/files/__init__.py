"""Files of models and adapters, read as hostile until they are checked; knows no model.

untrusted_files     opens only regular files in allowed directories; limits the text that errors quote
safetensors_header  header of a .safetensors file, validated
safetensors_file    one .safetensors file through a memory map; reading and checking bytes
adapter_file        an adapter's .safetensors file, read once and whole
update_file         an update of an adapter: an open file and its bytes in memory
"""
