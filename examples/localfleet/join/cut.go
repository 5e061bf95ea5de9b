package join

import "github.com/swactor/provisioning"

// Cut cuts the connection of an agent, as a network does. The agent comes
// again. It is false if none is connected.
func (s *Server) Cut(key provisioning.ExternalKey) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.members[key]
	return m != nil && m.conn != nil && m.conn.Close() == nil // closed before: an error
}
