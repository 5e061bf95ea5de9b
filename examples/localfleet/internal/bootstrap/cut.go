package bootstrap

// Cut cuts the connection to the machine, as a network does.
func (s *Stream) Cut() { s.conn.Close() }
