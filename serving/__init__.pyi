from .folder import ServingFolder as ServingFolder
from .publish import publish as publish
from .served import Served as Served
from .served import ServedVersion as ServedVersion
from .served import open_served as open_served
from .version import Version as Version
