"""The global data-flow graph and its builders."""
