from .folder import ServingFolder as ServingFolder
from .folder import Version as Version
from .publish import publish as publish
