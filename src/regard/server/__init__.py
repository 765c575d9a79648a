"""HTTP server: translation models behind LibreTranslate's API, and the API of the page.

Modules in import order; each imports only from those above it:

    schemas               settings; request and response bodies; reading, validation, OpenAPI descriptions
    prometheus            the metrics of /metrics
    dynamic_batching      queue that groups the sentences of all requests into batches for the model
    model_pool            the models of a server: loading, eviction, routes between languages
    service               translation of documents on top of the queues
    middleware            every request: security headers, metrics, host check; time limit for headers
    inspection_endpoints  traces and the training history; reloads the weights of a running training
    document_uploads      routes that translate uploaded documents
    streaming             route that streams a translation while it is being decoded
    app                   FastAPI application: middleware, error handlers, all other routes, the page /docs
    supervisor            the processes of a server: a supervisor and its workers; reload, restart, shutdown
"""
