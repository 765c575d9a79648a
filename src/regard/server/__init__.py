"""The server: a model behind HTTP, for programs that speak to LibreTranslate and for the page.

A module imports only from those above it:

    settings    every limit in one place
    inline      tags inside a sentence, which travel with its words
    split       a text or an HTML document: its sentences, their tags, and what stands between them
    metrics     what is counted, for Prometheus
    batching    sentences of all requests, translated together by the one thread that owns the model
    asked       what may be asked, how it is read, and what is answered
    service     the work behind the routes
    course      how the model learned; a run that still learns is followed
    traces      one sentence and all that can be seen of it; large ones are handed out layer by layer
    live        a translation while it is made
    app         the HTTP side: routes, and what stands around them
    run         a run folder, a port, and a clean end
"""
