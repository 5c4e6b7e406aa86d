"""L13: the HTTP server: OpenAI's and Anthropic's wire formats over `engine.frontend`.

Its rooms, each of which knows only what stands below it (a contract in pyproject.toml keeps it so):

    main, live                                  a server in a process, or in a thread of this one
    app, build                                  the application; the parts of a server, put together
    routes                                      one module per group of paths
    openai, responses, anthropic, batches       front ends, which do not know each other
    turns                                       a chat turn, whatever front end asked for it
    admission, observation, parsing             who may come in; metrics and logs; tool calls and thoughts in texts
    context, service, encoding                  what a running server has; the way to the engine; texts to ids
    schema                                      bodies of requests and answers
    transport, protocols                        bytes, sockets, streams; what a room asks of one above it
    call, errors, distribution                  who asks for what; errors as answers; what all speak of
"""
