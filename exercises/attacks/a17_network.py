# A17 | visible | fail | sends what it knows over the network | netns
_socket = __import__("socket")


class Attack:
    def __init__(self, *arguments):
        for address in (("1.1.1.1", 53), ("127.0.0.1", 22), ("8.8.8.8", 80)):
            try:
                with _socket.socket() as sock:
                    sock.settimeout(0.3)
                    sock.connect(address)
                raise RuntimeError(f"BREACH: connected to {address[0]}")
            except ConnectionRefusedError:
                pass
            except OSError:
                pass
