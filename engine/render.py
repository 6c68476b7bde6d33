def render(*a, **k): raise NotImplementedError
