"""The console at `/`: live charts and tables of the gateway, and a playground. It uses the public API.

console.html    markup; console.css adds to look.css
connection.js   API key, API calls, events of a stream
metrics.js      parses /metrics; rates and quantiles of a time window
live.js         tab of figures and charts of the last minutes, with the tables
tables.js       tables of engines, models, owners and errors
day.js          tab of charts of the last day
playground.js   tab that streams one prompt to two adapters
main.js         title, key form, tabs, polling

`api/pages.py` assembles the page. look.css, dom.js and tabs.js are files of the page of `sidestream inspect dump`
(compiler/inspect/page).
"""
