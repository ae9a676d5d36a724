"""tierbed: embedding tables that outgrow one device's memory, for PyTorch.

`import tierbed` has all that users need. A name is resolved at its first use (PEP 562): the import itself loads no
torch.
"""

try:
    import lazy_loader
except ImportError as error:  # this package is imported all the same: `tierbed doctor` is a part of it
    lacking = f"tierbed needs the package lazy-loader ({error}): pip install --force-reinstall lazy-loader"

    def __getattr__(name: str) -> object:
        raise AttributeError(name) if name.startswith("__") else ImportError(lacking)
else:
    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
