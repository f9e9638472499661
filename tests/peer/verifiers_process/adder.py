"""A server of tools, which verifiers starts as a program."""

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


if __name__ == "__main__":
    Adder.run()
