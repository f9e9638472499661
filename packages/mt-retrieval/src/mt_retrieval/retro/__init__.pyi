from .build import build_project as build_project
from .verify import verify_project as verify_project
