"""Metrics, access log and tracing: the gateway's observers.

observers       base class, and an observer that forwards to several
metrics         Prometheus metrics of the gateway
load_report     the header endpoint-load-metrics of an answer
history         the last day in one sample a minute, and the last failed requests
engine_metrics  counters and gauges of the engines, also under vLLM's names
access_log      a JSON line for each HTTP request
tracing         an OpenTelemetry span for each request that generates tokens
"""
