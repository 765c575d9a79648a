"""HTTP server: a translation model behind LibreTranslate's API, and the API of the page.

Modules in import order; each imports only from those above it:

    settings      limits of the server
    metrics       Prometheus metrics
    batching      queue that groups the sentences of all requests into batches for the model
    schemas       request and response bodies; reading, validation, OpenAPI descriptions
    service       translation of documents on top of the queue
    inspection    routes for traces and for the training history; reloads the weights of a running training
    streaming     route that streams a translation while it is being decoded
    app           FastAPI application: middleware, error handlers, all other routes
    serve         loads a run, opens a port, shuts down cleanly
"""
