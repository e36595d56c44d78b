"""The page at `/`: what the gateway does right now, and a playground. It asks the API that everyone asks, with a key of
its reader.

page.py         the page as one file, and the headers that let it load nothing else
console.html    the markup; console.css what the dump's look.css lacks
connection.js   the key, calls of the API, events of a stream
metrics.js      the text of /metrics as numbers; rates and quantiles of a window
live.js         the tab of figures, pictures and tables
playground.js   the tab that streams one prompt to two adapters
begin.js        title, key, tabs, and the clock

look.css, dom.js and tabs.js are those of `sidestream inspect dump`'s page (compiler/inspect/page), read as files.
"""
