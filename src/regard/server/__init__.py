"""HTTP server: a translation model behind LibreTranslate's API, and the API of the page.

Modules in import order; each imports only from those above it:

    schemas       settings; request and response bodies; reading, validation, OpenAPI descriptions
    batching      queue that groups the sentences of all requests into batches for the model; Prometheus metrics
    service       translation of documents on top of the queue
    middleware    every request: security headers, metrics, host check; time limit for headers
    inspection    routes for traces and for the training history; reloads the weights of a running training
    streaming     route that streams a translation while it is being decoded
    api_page      the page /docs, written from the OpenAPI description
    app           FastAPI application: middleware, error handlers, all other routes; loads a run and serves it
"""
