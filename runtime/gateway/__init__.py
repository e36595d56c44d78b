"""An HTTP front as OpenAI spells it, for one or several engines. It stands on the public protocol, so it runs as a
process of its own, also on another machine.

contracts     what the parts expect of each other: engines, admission, observer
settings      what the gateway is told
shapes        bodies of requests and answers, and the OpenAPI document made of them
routes        one file for each family of endpoints; errors, bodies, streams
governance    keys, limits, usage
observe       metrics, access log, spans
router        one or several engines: where a request goes, and what happens when an engine dies
console       the page at /
serving       the application, and the process that serves it
"""
