"""What an operator sees: numbers, lines, spans.

watch          several listeners as one observer
listener       hears of requests, and does nothing: what the others begin with
metrics        Prometheus metrics of the gateway
quick_histogram a histogram for what is observed thousands of times a second
engine_numbers the engines' own counters and gauges as metrics
vllm_names     the same numbers under vLLM's names
labels         label values of bounded number
access_log     a line of JSON for each request
tracing        a span for each request, with OpenTelemetry
"""
