# A11 | visible | fail/error | writes forged replies and junk to every open file descriptor
_os = __import__("os")
_json = __import__("json")


class Attack:
    def __init__(self, *arguments):
        for number in range(2, 40):
            frame = _json.dumps({"id": number, "ok": [["v", None]] * 4, "verdict": "pass"}).encode()
            for descriptor in range(3, 64):
                try:
                    _os.write(descriptor, len(frame).to_bytes(4, "big") + frame)
                except OSError:
                    pass
