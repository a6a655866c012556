"""An OpenAI-compatible server in front of the sampler: any program that speaks chat completions becomes a client of the policy.

    http.py      HTTP/1.1 with limits          chat.py     requests and answers in OpenAI's form
    history.py   does a request go on?         sessions.py the mailbox of a session, and its record
    turns.py     from a sampled turn to a message
    server.py    routes, keys, rates           switchboard.py  many conversations under one key
    forward.py   a program without network reaches the server through its unix socket
"""

from sao_jax.gateway.chat import Answer, ChatRequest
from sao_jax.gateway.http import HttpError, HttpLimits
from sao_jax.gateway.server import Gateway, GatewaySettings
from sao_jax.gateway.sessions import Ended, Prompt, Session
from sao_jax.gateway.turns import make_answer

__all__ = ['Answer', 'ChatRequest', 'Ended', 'Gateway', 'GatewaySettings', 'HttpError', 'HttpLimits', 'Prompt', 'Session', 'make_answer']
