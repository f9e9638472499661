from .build import build_project as build_project
from .database import build_database as build_database
from .embedder import open_embedder as open_embedder
from .index import add_to_index as add_to_index
from .index import train_index as train_index
from .query import find_neighbors as find_neighbors
from .verify import verify_project as verify_project
