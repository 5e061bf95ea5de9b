package provisioning

import (
	"cmp"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"strconv"
	"strings"
)

// The identifiers of the library are distinct string types, so that a lease
// cannot be passed where a session is meant. None but the name of a slot is ever
// parsed, and what that is made of is also kept as fields.
type (
	// RunID names one driver life. Two runs never share resources, so a
	// RunID must not be used again unless [Config.FirstAttempt] lies above
	// every attempt of the earlier life.
	RunID string
	// NodeGroupID names a group of equal slots within a run.
	NodeGroupID string
	// RoleID says what the nodes of a group are for. The library carries it.
	RoleID string
	// ProviderKind says which provider a group is rented from. The library
	// carries it; a backend routes on it.
	ProviderKind string
	// LogicalNodeID names a slot: "{group}-{index}". See [NewLogicalNodeID].
	LogicalNodeID string
	// ProviderLeaseID is the provider's own name of a rented machine.
	ProviderLeaseID string
	// SwactorID names the agent process that joined from a node.
	SwactorID string
	// BootstrapSessionID names one bootstrap of one attempt.
	BootstrapSessionID string
)

// NodeAttemptID names one incarnation of a slot. The first is 1 (or
// [Config.FirstAttempt]); 0 means none. It is never used twice within a run,
// also not after its slot is gone.
type NodeAttemptID uint64

// OperationID names one dispatched effect. Sequence starts at 1 in every
// attempt and is never used twice.
type OperationID struct {
	Attempt  NodeAttemptID `json:"attempt"`
	Sequence uint64        `json:"sequence"`
}

// String returns "attempt/sequence".
func (id OperationID) String() string {
	return strconv.FormatUint(uint64(id.Attempt), 10) + "/" + strconv.FormatUint(id.Sequence, 10)
}

// NewLogicalNodeID returns the name of slot index of group. Two different
// (group, index) pairs never share a name, because an index has no leading
// zero and no hyphen.
func NewLogicalNodeID(group NodeGroupID, index int) LogicalNodeID {
	return LogicalNodeID(string(group) + "-" + strconv.Itoa(index))
}

// split takes the name of a slot apart, by which it is found: no map of names has
// to be kept. It is false for all that NewLogicalNodeID makes of no index of a
// state.
func (id LogicalNodeID) split() (group NodeGroupID, index int, ok bool) {
	hyphen := strings.LastIndexByte(string(id), '-')
	digits := id[hyphen+1:]
	if hyphen < 0 || len(digits) == 0 || len(digits) > maxIndexDigits || digits[0] == '0' && len(digits) > 1 {
		return "", 0, false
	}
	for i := range len(digits) {
		digit := digits[i] - '0'
		if digit > 9 {
			return "", 0, false
		}
		index = index*10 + int(digit)
	}
	return NodeGroupID(id[:hyphen]), index, index < maxIndex
}

// CompareSlots is the order of slots everywhere: by group, then by index as a
// number, so that w-9 comes before w-10.
func CompareSlots(groupA NodeGroupID, indexA int, groupB NodeGroupID, indexB int) int {
	return cmp.Or(cmp.Compare(groupA, groupB), cmp.Compare(indexA, indexB))
}

// ExternalKey is the identity under which a backend asks its provider for
// things. It is fixed for an attempt: every retry of every operation of the
// attempt carries the same key, and no other attempt ever does (B1, B8).
//
// The text forms below are frozen: a later release returns the same text for
// the same key, or it would lose the machines of a running cluster. They hold
// nothing secret (B9).
type ExternalKey struct {
	Run     RunID         `json:"run"`
	Node    LogicalNodeID `json:"node"`
	Attempt NodeAttemptID `json:"attempt"`
}

const (
	// TokenLength is the length of every token: a letter and 26 characters
	// of base32, which hold 130 bits. It fits an EC2 ClientToken (64), GCE,
	// RFC 1035, Kubernetes and Hetzner labels (63) and Nova tags (60).
	TokenLength = 27
	// MinNameLength is the smallest limit for which [ExternalKey.Name] has an
	// answer.
	MinNameLength = TokenLength

	tokenLetter  = "k"
	hashDomain   = "swactor-provisioning/v1"
	purposeKey   = "key"
	purposeRun   = "run"
	purposeExtra = "extra"
)

var tokenEncoding = base32.StdEncoding.WithPadding(base32.NoPadding)

// Token returns the key as text matching ^[a-z][a-z2-7]{26}$.
func (k ExternalKey) Token() string { return tokenText(k.hash(purposeKey, "")) }

// TokenFor returns a token for a side resource of the attempt (a disk, an
// address, a key pair). It differs from Token and from every other purpose.
func (k ExternalKey) TokenFor(purpose string) string {
	return tokenText(k.hash(purposeExtra, purpose))
}

// UUID returns the key as an RFC 9562 version 8 UUID made of the same hash as
// Token, for providers that insist on one (GCE requestId).
func (k ExternalKey) UUID() string {
	sum := k.hash(purposeKey, "")
	sum[6] = sum[6]&0x0f | 0x80 // version 8: the bits are ours
	sum[8] = sum[8]&0x3f | 0x80 // variant of RFC 9562
	text := hex.EncodeToString(sum[:16])
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}

// Name returns a name of at most limit bytes: readable words from run, slot and
// attempt, then the whole token, which no shortening ever cuts. It is an RFC
// 1035 label (a letter first, then a-z, 0-9 and single hyphens). Below
// [MinNameLength] there is no such name and the answer is "".
func (k ExternalKey) Name(limit int) string {
	if limit < MinNameLength {
		return ""
	}
	token := k.Token()
	words := plainWords(string(k.Run) + "-" + string(k.Node) + "-" + strconv.FormatUint(uint64(k.Attempt), 10))
	if room := max(limit-TokenLength-1, 0); len(words) > room {
		words = strings.TrimRight(words[:room], "-")
	}
	if words == "" {
		return token
	}
	return words + "-" + token
}

// Labels returns what a provider without request tokens finds the machine
// again by: prefix+"run" is [RunToken], prefix+"token" is Token (match on this
// one), prefix+"name" is Name(63) and prefix+"attempt" the attempt in decimal.
// Every value fits the label rules of GCE, Kubernetes and Hetzner. The map is
// the caller's.
func (k ExternalKey) Labels(prefix string) map[string]string {
	return map[string]string{
		prefix + "run":     RunToken(k.Run),
		prefix + "token":   k.Token(),
		prefix + "name":    k.Name(63),
		prefix + "attempt": strconv.FormatUint(uint64(k.Attempt), 10),
	}
}

// RunToken returns a token that all resources of a run share, to list or sweep
// them by.
func RunToken(run RunID) string {
	h := sha256.New()
	writeField(h, hashDomain)
	writeField(h, purposeRun)
	writeField(h, string(run))
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return tokenText(sum)
}

func (k ExternalKey) hash(kind, purpose string) [sha256.Size]byte {
	h := sha256.New()
	writeField(h, hashDomain)
	writeField(h, kind)
	writeField(h, purpose)
	writeField(h, string(k.Run))
	writeField(h, string(k.Node))
	writeNumber(h, uint64(k.Attempt))
	var sum [sha256.Size]byte
	h.Sum(sum[:0])
	return sum
}

// writeField hashes a text with its length in front, so that no two lists of
// fields run together into the same bytes.
func writeField(h hash.Hash, s string) {
	writeNumber(h, uint64(len(s)))
	h.Write([]byte(s))
}

func writeNumber(h hash.Hash, n uint64) {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], n)
	h.Write(b[:])
}

func tokenText(sum [sha256.Size]byte) string {
	return tokenLetter + strings.ToLower(tokenEncoding.EncodeToString(sum[:])[:TokenLength-1])
}

// plainWords keeps letters and digits in lower case, turns every run of other
// bytes into one hyphen and makes the first byte a letter. The last byte
// is a hyphen only if that of s is none of them.
func plainWords(s string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		switch {
		case 'A' <= c && c <= 'Z':
			c += 'a' - 'A'
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9':
		default:
			c = '-'
		}
		if c == '-' && (b.Len() == 0 || b.String()[b.Len()-1] == '-') {
			continue
		}
		if b.Len() == 0 && c <= '9' {
			b.WriteByte('n')
		}
		b.WriteByte(c)
	}
	return b.String()
}
