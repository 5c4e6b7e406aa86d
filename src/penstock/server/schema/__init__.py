"""What goes over the wire, as msgspec structs: requests are decoded into them, the OpenAPI document is made of them."""
