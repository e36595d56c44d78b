"""Floor 4: the `sidestream` command, and what measures, trains and documents.

cli           finds a command's module and turns a user's mistake into one line
commands      one file a command
options       options that several commands share
bench         `sidestream bench`, and what else measures speed
tuning        `sidestream tune`
quality       `sidestream eval`: how close quantized serving is to bf16
pages         keeps the docs' tables and excerpts true
chaos         attacks a live server while healthy clients check every answer
train         makes the demo model (demo_model/)
"""
