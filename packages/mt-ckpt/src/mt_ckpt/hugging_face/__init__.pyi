from .module import read_module as read_module
