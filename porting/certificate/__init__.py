"""Certificates of ports: what was ported, how that is known.

And proof that it would be known if it were wrong.
"""

from concord.porting.certificate.certificate import Asked, Certificate, read, recorded, seal, text
from concord.porting.certificate.making import certify, verify

__all__ = ["Asked", "Certificate", "certify", "read", "recorded", "seal", "text", "verify"]
