"""One or several engines as one: where a request goes, and what happens when an engine dies.

router         `Router`: the gateway's engines
dispatch       the engine for a request now, or as soon as there is one
moved_stream   a stream that goes on in another engine when its own dies
catalogue      the adapters that were loaded through the router, for engines that come back without them
engine_link    one engine: its connection, and what it reports
book           which engine gets a request, and why; pure bookkeeping
standing       whether an engine is used, and when again
ranking        the least loaded of many engines
prefixes       which engines have seen a prompt's beginning
"""
