"""Reference codecs of keys and values, a file for each kind. See `core.kv_codec.KVCodec`."""
