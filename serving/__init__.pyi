from .folder import ServingFolder as ServingFolder
from .publish import publish as publish
from .version import Version as Version
