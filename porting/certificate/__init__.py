"""Certificates of ports: what was ported, how that is known.

And proof that it would be known if it were wrong.
"""

from concord.porting.certificate.certificate import Asked, Certificate, Item
from concord.porting.certificate.making import certify
from concord.porting.certificate.sealed import read, recorded, seal, text
from concord.porting.certificate.verifying import verify

__all__ = ["Asked", "Certificate", "Item", "certify", "read", "recorded", "seal", "text", "verify"]
