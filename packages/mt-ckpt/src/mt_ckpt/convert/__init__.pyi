from .engine import Report as Report
from .engine import convert as convert
from .verify import Verification as Verification
from .verify import verify_conversion as verify_conversion
