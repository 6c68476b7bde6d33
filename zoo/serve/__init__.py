"""The server: one process that chats, transcribes and draws over OpenAI's HTTP interface.

    python -m zoo serve --port 8080

A request goes app -> guard (who may ask, how much) -> an endpoint (chat, speech, pictures,
embeddings) -> the worker of its model, a thread of its own; chats share a batch (scheduler).
"""
