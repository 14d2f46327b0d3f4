"""What is replaced in which framework, in which versions, and why.

`base` has the mechanics, a folder per framework has the replacements. Only this room knows frameworks.
"""
