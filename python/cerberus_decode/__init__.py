"""The small reference decoder, its trained heads, and the command `cerberus`."""
