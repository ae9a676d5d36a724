"""tierbed: embedding tables that outgrow one device's memory, for PyTorch.

Names are imported at their first use (PEP 562), so `import tierbed` itself does not load torch.
"""

try:
    import lazy_loader
except ImportError as error:  # the import must still succeed, because `tierbed doctor` is part of this package
    message = f"tierbed needs the package lazy-loader ({error}): pip install --force-reinstall lazy-loader"

    def __getattr__(name: str) -> object:
        raise AttributeError(name) if name.startswith("__") else ImportError(message)
else:
    __getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
