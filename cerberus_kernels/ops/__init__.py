"""The operators, one folder each: api (docstring and checks), reference (the specification), native, triton."""
