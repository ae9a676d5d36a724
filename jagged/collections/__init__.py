"""Collections of tables as TorchRec describes them, and the configs that name their tables and features."""
