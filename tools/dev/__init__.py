"""Development tools. They are not part of the wheel, and nothing outside this folder imports them.

bench           benches that no command runs
chaos           attack a live server while healthy clients check every answer
fleet           the same for a fleet on Ray Serve
eval30m         train our evaluation model and its adapters, and evaluate them
drafts          train a draft head for a model
train           train the demo model (tools/demo_model)
pages           write the tables of the docs
command_line    parsers of the commands
"""
